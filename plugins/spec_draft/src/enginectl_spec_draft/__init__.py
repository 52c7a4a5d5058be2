"""Draft-model speculation for enginectl. This version registers nothing."""
