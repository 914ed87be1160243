"""What the entries of a batch mean, by name: all that the families' forwards take (tests/integrations/test_entries.py reads them).

An entry is more than its numbers where they say something of the whole sequence: such are read, shifted or counted before they are
cut. What is not known is refused, so that a new entry cannot be cut in silence.
"""

from ring_attn.documents.reading import PACKING

# One sequence's: ids and embeddings are cut; the mask tells padding and documents, positions tell documents, both are made anew.
SEQUENCES = tuple(
    prefix + name for prefix in ("", "decoder_") for name in ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
)
DOCUMENTS = PACKING  # read, and taken out
LABELS = ("labels", "shift_labels")  # shifted where the head shifts them, then cut
COUNT = ("num_items_in_batch",)  # of labels, over all ranks
TOKEN_TYPES = ("token_type_ids", "mm_token_type_ids")  # whole where masks read them, cut where embeddings do
PASSED = ("output_hidden_states", "output_router_logits", "return_dict")  # as they are; routers' logits are gathered for their loss

_CACHE = (
    "a K/V cache holds whole sequences; generate with the whole prompt, model.generate(...); in the place of PEFT's prefix tuning, "
    "whose prefix is a cache, use LoRA"
)
_HEADS = "it multiplies attention weights, which no rank has; prune the heads instead"
_IMAGES = "its features go where the tokens of the whole sequence say; give inputs_embeds of the whole sequence, made with them"
_LOGITS = "each rank has the logits of its own tokens; leave it out"
_ONE_TOKEN = "it names a token of the whole sequence, which one rank has; make the output yourself of hidden states of the whole"

_CACHES = ("past_key_values", "encoder_past_key_values", "cache_position", "use_cache", "cache", "cache_params", "padding_cache")
_FEATURES = (
    "pixel_values pixel_values_videos pixel_values_images pixel_values_local high_res_pixel_values image_pixel_values pixel_mask "
    "pixel_attention_mask image image_patches flattened_patches image_grid_thw video_grid_thw image_grids video_grids image_sizes "
    "image_sizes_videos image_position_ids video_position_ids image_embeds image_embeds_position_mask image_hidden_states "
    "image_attention_mask image_merge_sizes video_merge_sizes image_token_pooling video_token_pooling image_num_crops "
    "images_per_sample video_compression_mask video_second_per_grid second_per_grid_ts num_frames_per_video num_local_patches "
    "spatial_shapes patches_grid target_sizes target_sizes_videos aspect_ratio_ids aspect_ratio_mask vision_feature_layer "
    "vision_feature_select_strategy vision_aspect_ratio batch_num_images interpolate_pos_encoding downsample_mode tile_fine_mask "
    "mm_encoder_outputs cross_attention_states cross_attention_mask full_text_row_masked_out_mask input_features "
    "input_features_mask input_values input_values_cutoffs input_values_mask audio_input_features audio_embed_sizes "
    "audio_attention_mask audio_feature_lengths feature_attention_mask use_audio_in_video audio_latents audio_prompt_latents "
    "audio_prompt_latents_mask audio_input_ids audio_input_ids_mask qformer_input_ids qformer_attention_mask"
).split()
REFUSED = {
    **dict.fromkeys(_CACHES, _CACHE),
    "encoder_outputs": "the encoder's output is made from the batch; give the encoder's inputs",
    "output_attentions": "no rank ever has the attention weights",
    **dict.fromkeys(("logits_to_keep", "num_logits_to_keep"), _LOGITS),
    **dict.fromkeys(("head_mask", "decoder_head_mask", "cross_attn_head_mask"), _HEADS),
    **dict.fromkeys(("mc_token_ids", "mc_labels", "next_sentence_label", "start_positions", "end_positions"), _ONE_TOKEN),
    **dict.fromkeys(_FEATURES, _IMAGES),
}
# Inputs of a few families, of which nobody knows here how they are cut: refused like names that no family has.
UNKNOWN = frozenset(
    (
        "encoder_hidden_states encoder_attention_mask encoder_inputs_embeds conditioning_encoder_inputs_embeds "
        "text_encoder_inputs_embeds backbone_last_hidden_state shared_kv_states per_layer_inputs bbox bbox_first_token_mask "
        "visual_bbox langs lang_ids lengths padding_mask sequence_id input_mask perm_mask target_mapping mems use_mems "
        "global_attention_mask task_type_ids moe_mm_token_type_ids input_shape_ids input_pronunciation_ids char_input_ids "
        "char_count_per_id xpath_tags_seq xpath_subs_seq entity_ids entity_attention_mask entity_token_type_ids "
        "entity_position_ids entity_labels audio_labels text_labels labels_mask router_labels initial_token_labels "
        "subsequent_token_labels acoustic_loss_mask return_loss return_logits is_decoder reduction num_hashes width height "
        "inputs state sample noise timestep actions noise_scheduler ddpm_batch_multiplier num_diffusion_steps num_delay_tokens "
        "chunk_sample_lengths generation_step generation_steps residual_codes trailing_text_hidden tts_pad_embed "
        "talker_input_ids thinker_reply_part input_text_ids user_input_values user_audio_codes moshi_input_values "
        "moshi_audio_codes"
    ).split()
)
KNOWN = frozenset((*SEQUENCES, *DOCUMENTS, *LABELS, *COUNT, *TOKEN_TYPES, *PASSED, *REFUSED))
