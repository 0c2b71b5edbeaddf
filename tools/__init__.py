"""Repository tools."""
