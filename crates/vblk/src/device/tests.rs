use super::*;
use crate::kernel::uapi::StatsWords;
use crate::stats::State;

#[test]
fn no_device_says_what_loads_the_module() {
    let hint = |is_installed| Error::Missing { is_installed }.to_string();

    assert_eq!(
        hint(Some(true)),
        "/dev/vhost-blk: there is none, the module vhost_blk is not loaded; load it: modprobe \
         vhost_blk"
    );
    assert!(hint(Some(false)).contains("ringdisk-vhost-blk-dkms"));
    assert!(hint(None).contains("modprobe vhost_blk (when"));
}

#[test]
fn what_open_says_becomes_a_reason() {
    assert!(matches!(cannot_open(Errno::NOENT), Error::Missing { .. }));
    assert!(matches!(cannot_open(Errno::NXIO), Error::Missing { .. }));
    let denied = cannot_open(Errno::ACCESS);
    assert_eq!(denied.errno(), Some(Errno::ACCESS));
    assert!(denied.to_string().contains("GROUP=\"ringdisk\", MODE=\"0660\""), "{denied}");
    assert_eq!(cannot_open(Errno::MFILE), Error::Open { errno: Errno::MFILE });
}

#[test]
fn a_machine_without_the_module_is_told_so() {
    let there = std::path::Path::new(DEVICE).exists();
    if !ringdisk_testkit::limits::needs("lack of /dev/vhost-blk", !there) {
        return;
    }

    let error = Vblk::open(1).unwrap_err();

    assert!(matches!(error, Error::Missing { .. }), "{error}");
}

#[test]
fn every_error_is_one_line_and_names_the_device() {
    let errno = Errno::IO;
    let all = [
        Error::Missing { is_installed: Some(false) },
        Error::NotAllowed { errno },
        Error::Open { errno },
        Error::Foreign { errno },
        Error::Version { module: 2, ours: 1 },
        Error::Layout(crate::LayoutError::Differs("it does".into())),
        Error::Queues { queues: 65, limit: 64 },
        Error::NotOwner { doing: "stop queue 3".into() },
        Error::Features { features: 0 },
        Error::Features { features: 4 },
        Error::TooManyRegions { regions: 65, limit: 64 },
        Error::Disk { errno, bio: true },
        Error::Disk { errno: Errno::INVAL, bio: true },
        Error::Disk { errno: Errno::INVAL, bio: false },
        Error::Disk { errno: Errno::OPNOTSUPP, bio: false },
        Error::Worker { errno },
        Error::Ring { queue: 3, why: "a descriptor is no eventfd" },
        Error::NoQueue { queue: 3, queues: 2 },
        Error::Started { doing: "start queue 3".into() },
        Error::NotStarted { queue: 3 },
        Error::NoDisk,
        Error::System { doing: "start queue 3".into(), errno },
    ];

    for error in all {
        let text = error.to_string();
        assert!(text.starts_with("/dev/vhost-blk: ") && !text.contains('\n'), "{text}");
        assert!(!text.contains("  ") && !text.ends_with('.'), "{text}");
    }
}

#[test]
fn states_and_counters_are_those_of_the_kernel() {
    let words =
        StatsWords { state: uapi::BROKEN, reads: 1, kiocbs: 2, broken: 3, ..StatsWords::default() };

    let stats = Stats::of(&words);

    assert_eq!((stats.state, stats.reads, stats.kiocbs, stats.broken), (State::Broken, 1, 2, 3));
    assert_eq!(Stats::of(&StatsWords::default()).state, State::Idle);
    assert_eq!(Stats::of(&StatsWords { state: 9, ..words }).state, State::Unknown);
}

#[test]
fn a_device_may_go_to_another_thread() {
    fn is_send<T: Send + Sync>() {}

    is_send::<Vblk>();
}

#[test]
fn vhost_takes_at_least_its_default_of_regions() {
    assert!(regions_max() >= REGIONS_DEFAULT);
}
