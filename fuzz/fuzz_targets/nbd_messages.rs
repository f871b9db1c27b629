//! Any bytes as any part of the NBD protocol, for both sides: nothing panics, and what is parsed
//! is built again as it was.
#![no_main]

use libfuzzer_sys::fuzz_target;
use ringdisk_nbd_protocol::handshake::{
    ExportInfo, OptionHead, OptionReplyHead, parse_client_flags, parse_greeting,
};
use ringdisk_nbd_protocol::options::{
    InfoReply, InfoRequest, ListedExport, MetaContext, MetaRequest, parse_export_name,
};
use ringdisk_nbd_protocol::reply::{ErrorPayload, Hole, ReplyHead, parse_data_offset};
use ringdisk_nbd_protocol::request::{Request, Style};
use ringdisk_nbd_protocol::status::{StatusFilter, StatusPayload};

const STYLES: [Style; 3] = [Style::Simple, Style::Structured, Style::Extended];

/// What was parsed from `data` gives the same bytes.
fn same(data: &[u8], push: impl FnOnce(&mut Vec<u8>)) {
    let mut out = Vec::new();
    push(&mut out);
    assert_eq!(out, data);
}

fn handshake(data: &[u8]) {
    if let Some(bytes) = data.first_chunk() {
        let _ = parse_greeting(bytes);
    }
    if let Some(bytes) = data.first_chunk() {
        let _ = parse_client_flags(*bytes);
    }
    if let Some(bytes) = data.first_chunk()
        && let Ok(head) = OptionHead::parse(bytes)
    {
        assert_eq!(&head.to_bytes(), bytes);
    }
    if let Some(bytes) = data.first_chunk()
        && let Ok(head) = OptionReplyHead::parse(bytes)
    {
        assert_eq!(&head.to_bytes(), bytes);
    }
    if let Some(bytes) = data.first_chunk()
        && let Ok(info) = ExportInfo::parse(bytes)
    {
        assert_eq!(&info.to_bytes(), bytes);
    }
}

fn options(data: &[u8]) {
    let _ = parse_export_name(data);
    if let Ok(request) = InfoRequest::parse(data) {
        same(data, |out| request.push(out));
    }
    if let Ok(request) = MetaRequest::parse(data) {
        same(data, |out| request.push(out));
    }
    if let Ok(listed) = ListedExport::parse(data) {
        same(data, |out| listed.push(out));
    }
    if let Ok(context) = MetaContext::parse(data) {
        same(data, |out| context.push(out));
    }
    match InfoReply::parse(data) {
        Ok(InfoReply::Other(_)) | Err(_) => {}
        Ok(reply) => same(data, |out| reply.push(out)),
    }
}

fn transmission(kind: u16, data: &[u8]) {
    for style in STYLES {
        if let Ok(request) = Request::parse(style, data) {
            let bytes = match style {
                Style::Simple | Style::Structured => request.to_compact().to_vec(),
                Style::Extended => request.to_extended().to_vec(),
            };
            assert_eq!(bytes, data[..bytes.len()]);
        }
        if let Ok(Some((_, len))) = ReplyHead::parse(style, data) {
            assert!(len <= data.len());
        }
    }
    let _ = (Hole::parse(data), parse_data_offset(data), ErrorPayload::parse(kind, data));
    if let Ok(status) = StatusPayload::parse(kind, data) {
        assert!(status.extents().all(|extent| extent.len > 0));
    }
    if let Ok(filter) = StatusFilter::parse(data) {
        assert!(filter.ids().count() <= data.len() / 4);
    }
}

fuzz_target!(|data: &[u8]| {
    let Some((&[high, low], data)) = data.split_first_chunk() else { return };
    handshake(data);
    options(data);
    transmission(u16::from_be_bytes([high, low]), data);
    // The kinds that there are, which chance does not find.
    for kind in [1, 2, 5, 6, 0x8001, 0x8002] {
        transmission(kind, data);
    }
});
