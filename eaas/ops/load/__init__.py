"""Load from outside, and what it shows: arrivals, a streaming client, measures, faults on a time line, reports."""
