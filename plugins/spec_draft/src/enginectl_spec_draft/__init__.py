"""Speculation with a draft model for enginectl."""
