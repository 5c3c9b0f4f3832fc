"""The daemon as a service: HTTP, metrics, backups, systemd."""
