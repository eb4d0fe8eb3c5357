"""The parts of a run's report: what is read, what is drawn, and the page that shows it."""
