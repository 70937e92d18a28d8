"""Every order of a barrier's arrivals, cancels, deaths, reconnects, deadlines and restarts."""
