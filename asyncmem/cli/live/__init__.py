"""What `asyncmem top` shows, and how it is kept on a terminal."""
