//! Replies as tables of bytes (little-endian machines).

use rustix::io::Errno;

use super::{ReplyBuf, data_header, error_frame, notify_inval_inode, notify_resend};
use crate::abi::{Attr, AttrOut, InitOut, LseekOut, OpenOut, StatfsOut};

#[test]
fn an_error_is_a_header_with_a_negated_errno() {
    let mut out = ReplyBuf::new();
    out.set_error(0x0102, Errno::NOSPC);
    assert_eq!(out.as_bytes(), [16, 0, 0, 0, 0xe4, 0xff, 0xff, 0xff, 2, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(out.error_number(), 28);
    assert!(out.body().is_empty());
    assert_eq!(out.as_bytes(), error_frame(0x0102, Errno::NOSPC));
}

#[test]
fn an_errno_that_the_kernel_would_refuse_becomes_eio() {
    for number in [512, 517, 4095] {
        let frame = error_frame(1, Errno::from_raw_os_error(number));
        assert_eq!(frame[4..8], [0xfb, 0xff, 0xff, 0xff]);
    }
}

#[test]
fn an_empty_success_is_a_header() {
    let mut out = ReplyBuf::new();
    out.set_empty(3);
    assert_eq!(out.as_bytes(), [16, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_write_reply_has_eight_bytes_of_body() {
    let mut out = ReplyBuf::new();
    out.set_written(3, 1 << 20);
    let expected = [24, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0];
    assert_eq!(out.as_bytes(), expected);
}

#[test]
fn a_data_header_counts_the_data() {
    let expected = [0, 2, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0x80];
    assert_eq!(data_header(0x8000_0000_0000_0009, 496), expected);
}

#[test]
fn an_open_reply_is_written_field_by_field() {
    let mut out = ReplyBuf::new();
    out.set_body(3, &OpenOut { fh: 1, open_flags: 0x41, backing_id: 0 });
    assert_eq!(out.body(), [1, 0, 0, 0, 0, 0, 0, 0, 0x41, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(out.as_bytes()[0], 32);
}

#[test]
fn an_attribute_reply_is_written_field_by_field() {
    let attr =
        Attr { ino: 1, size: 0x4000_0000, blocks: 8, mode: 0o100_600, nlink: 1, ..Attr::default() };
    let mut out = ReplyBuf::new();
    out.set_body(3, &AttrOut { attr_valid: 1, attr_valid_nsec: 2, dummy: 0, attr });
    let body = out.body();
    assert_eq!(body.len(), 104);
    assert_eq!(body[..16], [1, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(body[16..32], [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x40, 0, 0, 0, 0]);
    assert_eq!(body[32..40], [8, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(body[76..84], [0x80, 0x81, 0, 0, 1, 0, 0, 0]);
}

#[test]
fn other_bodies_have_the_length_that_the_kernel_expects() {
    let mut out = ReplyBuf::new();
    out.set_body(1, &InitOut::default());
    assert_eq!(out.body().len(), 64);
    out.set_body(1, &StatfsOut::default());
    assert_eq!(out.body().len(), 80);
    out.set_body(1, &LseekOut { offset: 0x10 });
    assert_eq!(out.body(), [0x10, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn a_cleared_reply_is_empty() {
    let mut out = ReplyBuf::new();
    out.set_empty(1);
    out.clear();
    assert!(out.is_empty());
    assert!(out.as_bytes().is_empty());
    assert!(out.body().is_empty());
}

#[test]
fn notifications_have_unique_zero_and_their_code() {
    let attributes_only = [
        40, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, // header
        1, 0, 0, 0, 0, 0, 0, 0, // node
        255, 255, 255, 255, 255, 255, 255, 255, // offset -1
        0, 0, 0, 0, 0, 0, 0, 0, // length
    ];
    assert_eq!(notify_inval_inode(false), attributes_only);
    assert_eq!(notify_inval_inode(true)[24..], [0; 16]);
    assert_eq!(notify_resend(), [16, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
}

#[test]
fn an_operation_that_does_not_exist_is_no_failure_of_a_client() {
    for (errno, is_failure) in [(Errno::NOSYS, false), (Errno::IO, true), (Errno::NOENT, true)] {
        let mut reply = ReplyBuf::new();
        reply.set_error(1, errno);
        assert_eq!(reply.is_failure(), is_failure, "{errno:?}");
    }
    let mut reply = ReplyBuf::new();
    reply.set_empty(1);
    assert!(!reply.is_failure() && !ReplyBuf::new().is_failure());
}
