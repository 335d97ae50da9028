"""Server for robot policies over WebSocket."""
