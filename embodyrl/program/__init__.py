"""The library as other programs use it; `import embodyrl` has all of its names."""
