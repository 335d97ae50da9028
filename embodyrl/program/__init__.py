"""The Python library; `import embodyrl` exports its names."""
