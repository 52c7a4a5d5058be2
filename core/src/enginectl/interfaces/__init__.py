"""The contracts, one file a role. A plugin implements these; core calls nothing else of it."""
