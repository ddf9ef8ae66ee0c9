"""The caller's own objects while devices train copies of them: module, optimizer, constants."""
