"""The Python interface: functions that `import embodyrl` exports."""
