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

/// What a reason says, without numbers of the system.
fn words_of(reason: &HaltReason) -> String {
    strip_os_error(&reason.to_string())
}

#[test]
fn the_end_of_an_export_has_the_code_of_what_failed() {
    use ringdisk_export::ErrorKind;
    let errno = ringdisk_ring::Errno::IO;
    for (reason, exit) in [
        (HaltReason::Timeout(std::time::Duration::from_secs(5)), Exit::Storage),
        (HaltReason::Device("the FUSE device", errno), Exit::Halted),
        (HaltReason::Forced(1), Exit::Forced),
        (HaltReason::GaveUp, Exit::Storage),
        (HaltReason::Failed(ErrorKind::Socket, String::from("no socket")), Exit::Mountpoint),
    ] {
        let failure = Failure::of_halt(&reason, None);
        assert_eq!((failure.exit, failure.message()), (exit, &*words_of(&reason)));
    }
    let reason = HaltReason::Failed(ErrorKind::System, String::from("x: gone (os error 5)"));
    assert_eq!(Failure::of_halt(&reason, None).message(), "x: gone");
    assert!(Failure::of_halt(&HaltReason::GaveUp, None).hint_text().is_some());
}

#[test]
fn the_disk_knows_better_why_the_last_flush_failed() {
    let fault = || Some(String::from("the image is full"));
    let flush = Failure::of_halt(&HaltReason::Flush(ringdisk_ring::Errno::NOSPC), fault());
    assert_eq!((flush.exit, flush.message()), (Exit::Storage, "the image is full"));
    let forced = Failure::of_halt(&HaltReason::Forced(1), fault());
    assert!(forced.message().contains("at once"), "{}", forced.message());
}

#[test]
fn the_cause_stays_when_what_was_being_done_is_added() {
    use ringdisk_disk::Cause as Image;
    let no_base = Cause::Image(Image::NoBase);
    let failure = Failure::new(Exit::Usage, "no base").because(no_base.clone());
    assert_eq!(failure.cause(), Some(&no_base));
    let failure = failure.context("commit");
    assert_eq!(failure.message(), "commit: no base");
    assert_ne!(failure.cause(), Some(&no_base), "it happened to a part");
    assert_eq!(failure.image_cause(), Some(&Image::NoBase));
    let error = ringdisk_disk::Error::new(ringdisk_disk::ErrorKind::Locked, "'a' is in use");
    assert_eq!(Failure::from(error).image_cause(), Some(&Image::Other));
    assert_eq!(Failure::new(Exit::General, "x").cause(), None);
}
