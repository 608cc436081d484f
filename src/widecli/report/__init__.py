"""From run directories to tables, plots and one page; reads what runs recorded and measures nothing."""
