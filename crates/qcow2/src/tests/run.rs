use crate::run::{ExtentKind, Run};
use crate::units::{Bytes, HostOffset};

fn grown(first: ExtentKind, second: ExtentKind) -> bool {
    let mut run = Run::new();
    assert!(run.push(first, Bytes(512)));
    run.push(second, Bytes(512))
}

#[test]
fn data_that_follows_on_merges() {
    assert!(grown(
        ExtentKind::Data { offset: HostOffset(4096) },
        ExtentKind::Data { offset: HostOffset(4608) }
    ));
}

#[test]
fn data_elsewhere_does_not_merge() {
    assert!(!grown(
        ExtentKind::Data { offset: HostOffset(4096) },
        ExtentKind::Data { offset: HostOffset(5120) }
    ));
}

#[test]
fn reserved_zeroes_merge_only_when_they_follow_on() {
    let zero = |offset| ExtentKind::Zero { offset };
    assert!(grown(zero(Some(HostOffset(0))), zero(Some(HostOffset(512)))));
    assert!(!grown(zero(Some(HostOffset(0))), zero(Some(HostOffset(1024)))));
    assert!(!grown(zero(Some(HostOffset(0))), zero(None)));
    assert!(grown(zero(None), zero(None)));
}

#[test]
fn zeroes_do_not_merge_with_unallocated() {
    assert!(!grown(ExtentKind::Zero { offset: None }, ExtentKind::Unallocated));
}

#[test]
fn an_offset_at_the_end_of_the_number_range_does_not_merge() {
    assert!(!grown(
        ExtentKind::Data { offset: HostOffset(u64::MAX) },
        ExtentKind::Data { offset: HostOffset(511) }
    ));
}
