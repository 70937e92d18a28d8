"""Every sequence of events of a job, up to a bound, against what its launcher promises."""
