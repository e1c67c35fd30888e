"""Server under many streams, and text by token."""
