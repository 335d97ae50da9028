"""Small built-in tabletop simulator with blocks and plates (numpy only), for learning and tests; not a benchmark."""
