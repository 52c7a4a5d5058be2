"""A block-hash prefix cache for enginectl. This version registers nothing."""
