"""The HTTP application: routes, access, connections, metrics, status page."""
