"""Read files, archives and cached arrays, local or remote."""
