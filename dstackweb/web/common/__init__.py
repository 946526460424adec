"""What all pages share: navigation, polling, errors, announcements."""
