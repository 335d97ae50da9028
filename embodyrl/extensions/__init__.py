"""Extensions, one per folder: optional features that no module outside the extension's folder imports."""
