"""Programs about runs: reports, forecasts, advice, profiles, costs."""
