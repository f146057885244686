"""Which algorithm runs an operation: by tables, measurements of this node, and settings."""
