"""Traffic as one HTML page: `python -m workloads show NAME|TRACE ... -o page.html`."""
