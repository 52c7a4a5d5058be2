"""FlashInfer attention for enginectl. Importing this imports neither torch nor flashinfer."""
