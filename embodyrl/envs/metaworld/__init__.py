"""MetaWorld environments: 50 manipulation tasks for a Sawyer arm."""
