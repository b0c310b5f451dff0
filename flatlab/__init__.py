"""What the scripts share: sandboxes, episodes, training, search trees and run directories."""
