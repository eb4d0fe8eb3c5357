"""The report of a run: reads run folders, draws charts and tables, and renders the page."""
