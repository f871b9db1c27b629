use std::fs;

use ringdisk_testkit::limits::UringParameter;

use super::{SWITCH, SwitchWatch, is_enabled};

#[test]
fn a_switch_that_nobody_touches_stayed_on() {
    let Some(_switch) = UringParameter::set(true) else { return };
    let watch = SwitchWatch::new();
    assert_eq!(is_enabled(), Some(true));
    assert!(watch.stayed_on());
}

#[test]
fn a_switch_that_is_off_did_not_stay_on() {
    let Some(_switch) = UringParameter::set(true) else { return };
    let (watch, blind) = (SwitchWatch::new(), SwitchWatch(None));
    fs::write(SWITCH, "N").expect("the switch");
    assert!(!watch.stayed_on());
    assert!(!blind.stayed_on());
}

#[test]
fn a_switch_that_was_off_for_a_moment_did_not_stay_on() {
    let Some(_switch) = UringParameter::set(true) else { return };
    let watch = SwitchWatch::new();
    assert!(watch.0.is_some(), "inotify");
    fs::write(SWITCH, "N").expect("the switch");
    fs::write(SWITCH, "Y").expect("the switch");
    assert!(!watch.stayed_on());
}
