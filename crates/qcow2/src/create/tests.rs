use super::plan::Plan;
use super::{CreateOptions, Preallocation, check_options, ones};
use crate::ErrorKind;
use crate::info::CompressionType;
use crate::units::{Bytes, HostCluster};

fn options() -> CreateOptions {
    CreateOptions { size: Bytes(1 << 30), ..CreateOptions::default() }
}

fn refusal(options: &CreateOptions) -> String {
    let error = check_options("x", options).expect_err("options that no image can have");
    assert_eq!(error.kind(), ErrorKind::InvalidRequest);
    error.reason().to_owned()
}

#[test]
fn an_empty_disk_has_four_clusters() {
    let plan = Plan::new("x", &options()).expect("plain options");
    assert_eq!(
        (plan.l1_entries, plan.l1_start(), plan.clusters()),
        (2, HostCluster(3), HostCluster(4))
    );
}

#[test]
fn a_disk_without_bytes_has_no_l1_table() {
    let plan =
        Plan::new("x", &CreateOptions { size: Bytes::ZERO, ..options() }).expect("plain options");
    assert_eq!((plan.l1_entries, plan.clusters()), (0, HostCluster(3)));
}

#[test]
fn refcounts_cover_all_clusters_and_themselves() {
    for cluster_bits in [9, 12, 16, 21] {
        for refcount_bits in [1, 16, 64] {
            for size in [0, 1 << 20, 1 << 30, (1 << 36) + 512] {
                let options = CreateOptions {
                    cluster_size: Bytes(1 << cluster_bits),
                    refcount_bits,
                    preallocation: Preallocation::Metadata,
                    size: Bytes(size),
                    ..options()
                };
                let Ok(plan) = Plan::new("x", &options) else {
                    assert_eq!((cluster_bits, size), (9, (1 << 36) + 512));
                    continue;
                };
                assert!(plan.refcount_blocks * plan.block_entries() >= plan.clusters().0);
                assert!((plan.refcount_blocks - 1) * plan.block_entries() < plan.clusters().0);
                assert!(plan.refcount_table_clusters << cluster_bits >= plan.refcount_blocks * 8);
            }
        }
    }
}

#[test]
fn sizes_are_rounded_up_to_sectors() {
    let rounded = |size| check_options("x", &CreateOptions { size, ..options() });
    assert_eq!(rounded(Bytes(1)).expect("small"), Bytes(512));
    assert_eq!(rounded(Bytes(1000)).expect("small"), Bytes(1024));
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let of = |size, cluster_size| {
        let (size, cluster_size) = (Bytes(size), Bytes(cluster_size));
        check_options("x", &CreateOptions { size, cluster_size, ..options() }).map(drop)
    };
    for size in [u64::MAX, 1 << 63, (1 << 63) - 1] {
        assert_eq!(of(size, 65536).unwrap_err().kind(), ErrorKind::InvalidRequest);
    }
    // 4 Mi entries of the L1 table, each for cluster_size² / 8 bytes.
    for (cluster_size, largest) in [(512, 128 << 30), (65536, 2 << 50), (2 << 20, 1 << 61)] {
        assert!(of(largest, cluster_size).is_ok());
        assert_eq!(of(largest + 1, cluster_size).unwrap_err().kind(), ErrorKind::TooLarge);
    }
}

#[test]
fn options_that_no_image_can_have_are_refused() {
    for cluster_size in [0, 1, 256, 3000, 4 << 20, u64::MAX] {
        assert!(
            refusal(&CreateOptions { cluster_size: Bytes(cluster_size), ..options() })
                .contains("power of two")
        );
    }
    for refcount_bits in [0, 3, 128, u32::MAX] {
        assert!(refusal(&CreateOptions { refcount_bits, ..options() }).contains("power of two"));
    }
    for version in [0, 1, 4] {
        assert!(refusal(&CreateOptions { version, ..options() }).contains("not known"));
    }
    let v2 = CreateOptions { version: 2, ..options() };
    let name = Some(b"name".to_vec());
    for options in [
        CreateOptions { refcount_bits: 8, ..v2.clone() },
        CreateOptions { lazy_refcounts: true, ..v2.clone() },
        CreateOptions { extended_l2: true, ..v2.clone() },
        CreateOptions { compression: CompressionType::Zstd, ..v2.clone() },
        CreateOptions { data_file: name.clone(), ..v2 },
    ] {
        assert!(refusal(&options).contains("compatibility level 1.1"), "{options:?}");
    }
    let extended = CreateOptions { extended_l2: true, cluster_size: Bytes(8192), ..options() };
    assert!(refusal(&extended).contains("16384"));
    let raw = CreateOptions { data_file_raw: true, ..options() };
    assert!(refusal(&raw).contains("needs data_file"));
    let both = CreateOptions { data_file: name.clone(), backing_file: name.clone(), ..raw };
    assert!(refusal(&both).contains("data_file_raw"));
    let full =
        CreateOptions { backing_file: name, preallocation: Preallocation::Full, ..options() };
    assert!(refusal(&full).contains("extended_l2"));
}

#[test]
fn names_that_do_not_fit_are_refused() {
    for name in [Vec::new(), vec![b'n'; 1024], b"a\0b".to_vec()] {
        let backing = CreateOptions { backing_file: Some(name.clone()), ..options() };
        assert!(refusal(&backing).contains("backing file"));
        let data = CreateOptions { data_file: Some(name), ..options() };
        assert!(refusal(&data).contains("data file"));
    }
    let format = CreateOptions { backing_format: Some("raw".into()), ..options() };
    assert!(refusal(&format).contains("without a backing file"));
    let backing_file = Some(b"base".to_vec());
    for name in ["", "a-name-of-16-byte"] {
        let backing_format = Some(name.to_owned());
        let backing_file = backing_file.clone();
        let format = CreateOptions { backing_file, backing_format, ..options() };
        assert!(refusal(&format).contains("1 to 15 bytes"));
    }
    let small = CreateOptions {
        cluster_size: Bytes(512),
        backing_file: Some(vec![b'n'; 400]),
        ..options()
    };
    assert!(refusal(&small).contains("no room"));
}

#[test]
fn a_disk_can_be_too_large_to_be_preallocated() {
    let options = CreateOptions {
        size: Bytes(1 << 36),
        cluster_size: Bytes(512),
        refcount_bits: 64,
        preallocation: Preallocation::Metadata,
        ..options()
    };
    let error = check_options("x", &options).expect_err("2^27 clusters, 64 counts in a block");
    assert_eq!(error.kind(), ErrorKind::TooLarge);
}

#[test]
fn counts_of_one_in_every_width() {
    let block = |bits, count| (0..8).map(|at| ones(at, bits, count)).collect::<Vec<_>>();
    assert_eq!(block(1, 11), [0xff, 0x07, 0, 0, 0, 0, 0, 0]);
    assert_eq!(block(2, 5), [0x55, 0x01, 0, 0, 0, 0, 0, 0]);
    assert_eq!(block(4, 3), [0x11, 0x01, 0, 0, 0, 0, 0, 0]);
    assert_eq!(block(8, 3), [1, 1, 1, 0, 0, 0, 0, 0]);
    assert_eq!(block(16, 3), [0, 1, 0, 1, 0, 1, 0, 0]);
    assert_eq!(block(64, 1), [0, 0, 0, 0, 0, 0, 0, 1]);
}
