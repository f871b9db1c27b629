//! Words of the command line.

use crate::{Cache, ErrorKind, Format};

#[test]
fn words_are_qemus() {
    assert_eq!("raw".parse::<Format>().expect("format"), Format::Raw);
    assert_eq!("qcow2".parse::<Format>().expect("format"), Format::Qcow2);
    assert_eq!("writeback".parse::<Cache>().expect("cache"), Cache::Writeback);
    assert_eq!("none".parse::<Cache>().expect("cache"), Cache::None);
    assert_eq!("writethrough".parse::<Cache>().expect("cache"), Cache::Writethrough);
    assert_eq!("directsync".parse::<Cache>().expect("cache"), Cache::DirectSync);
    assert_eq!("unsafe".parse::<Cache>().expect("cache"), Cache::Unsafe);
}

#[test]
fn other_words_are_refused_with_the_known_ones() {
    let error = "vmdk".parse::<Format>().expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::UnknownFormat);
    assert!(error.message().contains("raw, qcow2"));
    let error = "sometimes".parse::<Cache>().expect_err("refused");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.message().contains("writethrough") && error.message().contains("directsync"));
}
