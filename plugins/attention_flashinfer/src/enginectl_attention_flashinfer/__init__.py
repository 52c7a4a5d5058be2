"""FlashInfer attention for enginectl. This version registers nothing."""
