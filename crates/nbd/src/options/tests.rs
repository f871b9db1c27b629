use ringdisk_disk::NullOptions;

use super::*;

fn disk(name: &str) -> NamedDisk {
    NamedDisk::new(name, Disk::null(&NullOptions::default()))
}

#[test]
fn defaults_can_be() {
    check(&[disk("")], &NbdOptions::default()).expect("defaults");
    check(&[disk("a"), disk("b")], &NbdOptions::default()).expect("two names");
}

#[test]
fn each_value_out_of_its_limits_is_named() {
    let many = NbdOptions { max_connections: CONNECTIONS_MAX + 1, ..NbdOptions::default() };
    let long = NamedDisk { description: "x".repeat(4097), ..disk("") };
    for (disks, options, text) in [
        (vec![], NbdOptions::default(), "no disk"),
        (vec![disk("a"), disk("a")], NbdOptions::default(), "two disks are named 'a'"),
        (vec![disk(&"x".repeat(4097))], NbdOptions::default(), "4097 bytes; 4096 is the most"),
        (vec![long], NbdOptions::default(), "the description of an export has 4097"),
        (vec![disk("a\0b")], NbdOptions::default(), "NUL"),
        (vec![disk("")], many, "10001 connections"),
    ] {
        let error = check(&disks, &options).expect_err(text);
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.to_string().contains(text), "{error}");
    }
}
