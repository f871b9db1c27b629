//! Description of the layers of a disk as JSON, as `qemu-img info --output=json` prints it.
//!
//! Promises: the same keys in the same order as QEMU 11. One value differs on purpose:
//! `virtual-size` of a raw image is its exact size (QEMU rounds up to 512). Control path.

use ringdisk_qcow2::{Info, Snapshot};
use ringdisk_storage::Kind as StorageKind;
use serde_json::{Map, Value, json};

use crate::layer::Layer;
use crate::limits::SECTOR_BYTES;
use crate::{Disk, Format};

/// The whole chain, top first, as `qemu-img info --backing-chain --output=json` prints it.
pub fn chain(disk: &Disk) -> Value {
    Value::Array(disk.layers().iter().map(|it| layer(it)).collect())
}

/// One layer, as `qemu-img info --output=json` prints it.
pub fn layer(layer: &Layer) -> Value {
    let info = layer.qcow2().map(|image| image.info());
    let mut object = Map::new();
    let mut put = |key: &str, value: Value| {
        object.insert(key.to_owned(), value);
    };
    if let Some(child) = file_child(layer) {
        put("children", json!([{ "name": "file", "info": child }]));
    }
    if let Some(format) = info.and_then(|info| info.backing_format.as_ref()) {
        put("backing-filename-format", json!(format));
    }
    if let Some(info) = info
        && !info.snapshots.is_empty()
    {
        put("snapshots", info.snapshots.iter().map(snapshot).collect());
    }
    put("virtual-size", json!(layer.size().0));
    put("filename", json!(layer.name().to_string_lossy()));
    if let Some(info) = info {
        put("cluster-size", json!(info.cluster_size().0));
    }
    put("format", json!(layer.format().map_or("null-co", Format::name)));
    if let Some(file) = layer.file() {
        put("actual-size", json!(file.allocated_bytes()));
    }
    if let Some(info) = info {
        let bitmaps = layer.qcow2().map(|image| image.bitmaps()).unwrap_or_default();
        let data = qcow2_data(info, &bitmaps, layer);
        put("format-specific", json!({ "type": "qcow2", "data": data }));
        if let Some(full) = layer.full_backing_name() {
            put("full-backing-filename", json!(full));
        }
        if let Some(name) = &info.backing_file {
            put("backing-filename", json!(String::from_utf8_lossy(name)));
        }
    }
    put("dirty-flag", json!(info.is_some_and(|info| info.dirty)));
    Value::Object(object)
}

/// The protocol layer below the format, as QEMU counts it.
fn file_child(layer: &Layer) -> Option<Value> {
    let file = layer.file()?;
    let format = match file.kind() {
        _ if file.nbd_address().is_some() => "nbd",
        StorageKind::BlockDevice => "host_device",
        StorageKind::Regular | StorageKind::Custom => "file",
    };
    Some(json!({
        "children": [],
        "virtual-size": file.len().next_multiple_of(SECTOR_BYTES.0),
        "filename": layer.name().to_string_lossy(),
        "format": format,
        "actual-size": file.allocated_bytes(),
        "format-specific": { "type": format, "data": {} },
        "dirty-flag": false,
    }))
}

/// `format-specific.data` of qcow2.
fn qcow2_data(info: &Info, bitmaps: &[ringdisk_qcow2::Bitmap], layer: &Layer) -> Value {
    let mut data = Map::new();
    let mut put = |key: &str, value: Value| {
        data.insert(key.to_owned(), value);
    };
    put("compat", json!(info.compat()));
    put("compression-type", json!(info.compression.name()));
    if info.version >= 3 {
        put("lazy-refcounts", json!(info.lazy_refcounts));
    }
    if !bitmaps.is_empty() {
        put("bitmaps", bitmaps.iter().map(bitmap).collect());
    }
    put("refcount-bits", json!(info.refcount_bits));
    if info.version >= 3 {
        if let Some(name) = &info.data_file {
            put("data-file", json!(String::from_utf8_lossy(name)));
        } else if let Some(name) = layer.data_name() {
            put("data-file", json!(name.to_string_lossy()));
        }
        if info.external_data_file {
            put("data-file-raw", json!(info.data_file_raw));
        }
        put("corrupt", json!(info.corrupt));
        put("extended-l2", json!(info.extended_l2));
    }
    Value::Object(data)
}

fn bitmap(bitmap: &ringdisk_qcow2::Bitmap) -> Value {
    let mut flags = Vec::new();
    if bitmap.in_use {
        flags.push("in-use");
    }
    if bitmap.auto {
        flags.push("auto");
    }
    json!({
        "flags": flags,
        "name": bitmap.name,
        "granularity": bitmap.granularity_bytes.0,
    })
}

fn snapshot(snapshot: &Snapshot) -> Value {
    const NANOSECONDS: u64 = 1_000_000_000;
    let mut value = Map::new();
    if let Some(count) = snapshot.instruction_count {
        value.insert("icount".to_owned(), count.into());
    }
    let rest = json!({
        "vm-clock-nsec": snapshot.vm_clock_nanoseconds % NANOSECONDS,
        "name": snapshot.name,
        "date-sec": snapshot.date_seconds,
        "date-nsec": snapshot.date_nanoseconds,
        "vm-clock-sec": snapshot.vm_clock_nanoseconds / NANOSECONDS,
        "id": snapshot.id,
        "vm-state-size": snapshot.vm_state_bytes.0,
    });
    if let Value::Object(rest) = rest {
        value.extend(rest);
    }
    Value::Object(value)
}
