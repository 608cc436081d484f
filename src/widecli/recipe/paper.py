"""The paper's calibration: how much text its schedule takes."""

STEPS = 10_000
TOKENS_A_STEP = 16 * 4096
TOKENS = STEPS * TOKENS_A_STEP
