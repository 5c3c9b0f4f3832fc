"""What a durable daemon keeps on disk, and how it reads it again."""
