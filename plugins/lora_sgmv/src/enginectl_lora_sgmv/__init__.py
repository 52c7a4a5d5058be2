"""Multi-LoRA for enginectl: adapters of any rank, mixed in one batch."""
