"""Multi-LoRA kernels for enginectl. This version registers nothing."""
