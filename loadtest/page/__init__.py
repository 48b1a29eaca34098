"""The pages' templates, style and script; `loadtest.page.render` puts them together."""
