"""MetaWorld: fifty manipulation tasks of one arm."""
