"""What images are like after a guest."""

from processes import output, require


def sound(image):
    """Fails when the tables of an image are broken. Clusters that nobody uses are no harm: a killed
    daemon may leave some.
    """
    text = output("qemu-img", "check", image, expect=None)
    require(
        "No errors were found" in text or "0 errors were found" in text or "errors" not in text,
        f"{image}: {text}",
    )
    require("ERROR" not in text, f"{image}: {text}")
