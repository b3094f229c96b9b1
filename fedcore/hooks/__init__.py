"""The contract: hook specifications, what hooks see, plugins and their options, the set-up that both sides share."""
