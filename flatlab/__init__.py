"""Package of the scripts: sandboxes, episodes, training, search trees and run directories."""
