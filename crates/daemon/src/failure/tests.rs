use super::*;

#[derive(Debug)]
struct Outer(io::Error);

impl std::fmt::Display for Outer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("cannot read 'x'")
    }
}

impl StdError for Outer {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(&self.0)
    }
}

#[test]
fn codes_are_their_place_in_the_table() {
    for (number, (exit, name, meaning)) in MEANINGS.iter().enumerate() {
        assert_eq!(usize::from(exit.code()), number);
        assert!(!name.is_empty() && meaning.ends_with('.'));
    }
}

#[test]
fn the_table_of_the_documentation_is_this_one() {
    let page = include_str!("../../../../docs/exit-codes.md");
    for (exit, name, meaning) in MEANINGS {
        let row = format!("| {} | {name} | {meaning} |", exit.code());
        assert!(page.contains(&row), "docs/exit-codes.md lacks: {row}");
    }
}

#[test]
fn causes_are_said_once_and_without_numbers() {
    let error = Outer(io::Error::from_raw_os_error(5));
    assert_eq!(chain(&error), "cannot read 'x': Input/output error");
    let repeated = ringdisk_fuse::Error::new(ringdisk_fuse::ErrorKind::System, "mount failed")
        .source(io::Error::from_raw_os_error(1));
    assert_eq!(chain(&repeated), "mount failed: Operation not permitted");
}

#[test]
fn a_forbidden_ring_keeps_its_code_inside_another_error() {
    let ring = SetupError::Forbidden(io::Error::from_raw_os_error(1));
    let error =
        ringdisk_fuse::Error::new(ringdisk_fuse::ErrorKind::System, "no queue").source(ring);
    assert_eq!(Failure::from(error).exit, Exit::IoUring);
}

#[test]
fn kinds_have_their_codes() {
    use ringdisk_disk::ErrorKind as Disk;
    for (kind, exit) in [
        (Disk::NotFound, Exit::Image),
        (Disk::PermissionDenied, Exit::Permission),
        (Disk::Locked, Exit::Locked),
        (Disk::Cancelled, Exit::General),
        (Disk::Unsupported, Exit::Unsupported),
        (Disk::Corrupt, Exit::Image),
    ] {
        assert_eq!(Failure::from(ringdisk_disk::Error::new(kind, "x")).exit, exit);
    }
}
