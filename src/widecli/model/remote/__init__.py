"""Code that travels with exported models: it imports torch, transformers and safetensors, and nothing of widecli."""
