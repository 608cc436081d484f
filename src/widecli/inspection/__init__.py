"""What the routers of a checkpoint learned: their decisions on a text, and statistics of them."""
