use super::*;

fn read(text: &str) -> Limits {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

#[test]
fn words_are_read_and_printed_again() {
    let limits = read("iops=1000,bps-write=50M,iops-max=5000,iops-max-length=10,iops-size=64k");
    let total = Rate { average: 1000, burst: 5000, burst_seconds: 10 };
    assert_eq!(limits.iops, Rates { total, ..Rates::default() });
    assert_eq!(limits.bps.write, Rate { average: 50 << 20, ..Rate::default() });
    assert_eq!(limits.iops_size, 64 << 10);
    for text in ["none", "iops=1", "bps-read=1G,bps-write=2T", "iops-read=5,iops-read-max=6"] {
        assert_eq!(read(&read(text).to_string()), read(text), "{text}");
    }
    assert_eq!(read(&limits.to_string()), limits);
    assert_eq!(Limits::default().to_string(), "none");
}

#[test]
fn only_what_is_named_changes() {
    let limits = read("iops=1000,iops-max=5000,bps=1M");
    let changed = limits.changed("bps=2M").expect("good");
    assert_eq!(changed, read("iops=1000,iops-max=5000,bps=2M"));
    // A limit that goes takes its bursts with it.
    assert_eq!(changed.changed("iops=0").expect("good"), read("bps=2M"));
    assert_eq!(changed.changed("iops=0,iops-read=5").expect("good"), read("bps=2M,iops-read=5"));
    assert!(changed.changed("none").expect("good").are_none());
}

#[test]
fn what_means_nothing_is_refused_by_name() {
    for (text, reason) in [
        ("", "is no limit"),
        ("iops", "is no limit"),
        ("iops=", "iops=: a limit is a number"),
        ("iops=-1", "a limit is a number"),
        ("iops=+1", "a limit is a number"),
        ("iops=1.5", "a limit is a number"),
        ("iops=18446744073709551616", "a limit is a number"),
        ("iops=1000000000000001", "a limit is a number"),
        ("bps=99999999T", "a limit is a number"),
        ("iops=M", "a limit is a number"),
        ("iops=5\u{fc}", "a limit is a number"),
        ("ipos=5", "unknown limit 'ipos'"),
        ("iops-size-max=5", "unknown limit"),
        ("iops=5,iops-read=5", "cannot be limited at the same time"),
        ("bps=5,bps-write=5", "bps (total)"),
        ("iops-max=5", "iops-max needs iops:"),
        ("iops=5,iops-max=4", "below"),
        ("iops=5,iops-max-length=4", "needs iops-max"),
        ("iops=5,iops-max=9,iops-max-length=0", "at least 1 second"),
        ("iops=5,iops-max=1000000000000,iops-max-length=10000", "is more than"),
        ("bps=5,iops-size=4096", "needs a limit of iops"),
    ] {
        let error = text.parse::<Limits>().expect_err(text);
        assert!(error.to_string().contains(reason), "{text}: {error}");
    }
}
