"""Extensions: optional features, one per folder, which the `extension.toml` of the folder registers."""
