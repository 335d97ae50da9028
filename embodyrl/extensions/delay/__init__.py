"""Inference delay: action chunks that begin some env steps after their observation was made."""
